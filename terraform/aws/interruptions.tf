# EventBridge's rules cannot select machines by tag: the queue gets the events of all machines of the region, and the
# dispatcher ignores foreign ones.

locals {
  rules = var.interruption_queue ? { for i, pattern in local.base.queue.patterns : "${local.names.queue}-${i}" => jsonencode(pattern) } : {}
}

resource "aws_sqs_queue" "interruptions" {
  count                      = var.interruption_queue ? 1 : 0
  name                       = local.names.queue
  message_retention_seconds  = local.base.queue.retention_s
  visibility_timeout_seconds = local.base.queue.visibility_s
  sqs_managed_sse_enabled    = true
  tags                       = local.tags
}

resource "aws_sqs_queue_policy" "interruptions" {
  count     = var.interruption_queue ? 1 : 0
  queue_url = aws_sqs_queue.interruptions[0].id
  policy    = jsonencode(local.base.queue.policy)
}

resource "aws_cloudwatch_event_rule" "interruptions" {
  for_each      = local.rules
  name          = each.key
  description   = local.base.queue.description
  event_pattern = each.value
  tags          = local.tags
}

resource "aws_cloudwatch_event_target" "interruptions" {
  for_each  = local.rules
  rule      = aws_cloudwatch_event_rule.interruptions[each.key].name
  target_id = local.base.queue.target
  arn       = aws_sqs_queue.interruptions[0].arn
}
