# A role each for the dispatcher and for hosts, both with a boundary. Their rights are limited to resources that carry
# the base's tag, which the command line puts on everything that it makes on this base.

locals {
  boundary = coalesce(var.permissions_boundary, try(aws_iam_policy.boundary[0].arn, null))
  trust    = startswith(var.region, "cn-") ? local.base.trust.china : local.base.trust.usual

  # Statements of parts that this base does not have are left out.
  left_out = {
    dispatcher = concat(var.disk_key == null ? ["UseKey", "LendKey"] : [], var.interruption_queue ? [] : ["Hear"])
    host       = var.bucket_key == null ? ["UseKey"] : []
  }
  policies = {
    for role, document in { dispatcher = local.base.policies.dispatcher, host = local.base.policies.host } : role => {
      Version                          = document.Version
      Statement                        = [for statement in document.Statement : statement if !contains(local.left_out[role], statement.Sid)]
    }
  }
  role_names = { dispatcher = local.names.dispatcher_role, host = local.names.host_role }
}

resource "aws_iam_policy" "boundary" {
  count       = var.permissions_boundary == null ? 1 : 0
  name        = local.names.boundary
  path        = local.names.iam_path
  description = "Bounds the roles of the spotfleet base ${var.name}"
  policy      = jsonencode(local.base.policies.boundary)
  tags        = local.tags
}

resource "aws_iam_role" "this" {
  for_each = local.role_names

  name                 = each.value
  path                 = local.names.iam_path
  description          = "Rights of the ${each.key}s of fleets on the spotfleet base ${var.name}"
  assume_role_policy   = jsonencode(local.trust)
  permissions_boundary = local.boundary
  tags                 = local.tags
}

resource "aws_iam_role_policy" "this" {
  for_each = local.role_names

  name   = each.value
  role   = aws_iam_role.this[each.key].name
  policy = jsonencode(local.policies[each.key])
}

resource "aws_iam_instance_profile" "this" {
  for_each = local.role_names

  name = each.value
  path = local.names.iam_path
  role = aws_iam_role.this[each.key].name
  tags = local.tags
}
