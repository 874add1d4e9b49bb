locals {
  contract = {
    version          = local.base.contract
    module           = local.base.module
    provider         = "aws"
    name             = var.name
    account          = local.account
    region           = var.region
    network          = local.vpc_id
    subnets          = local.subnet_ids
    public_addresses = var.public_addresses
    firewall = {
      hosts      = [aws_security_group.hosts.id]
      dispatcher = [aws_security_group.dispatcher.id]
    }
    identities = {
      hosts      = aws_iam_instance_profile.this["host"].name
      dispatcher = aws_iam_instance_profile.this["dispatcher"].name
    }
    checkpoints         = "s3://${local.makes_bucket ? aws_s3_bucket.checkpoints[0].id : local.bucket}/${var.checkpoint_prefix}"
    queue               = var.interruption_queue ? aws_sqs_queue.interruptions[0].name : ""
    image               = var.image == null ? "" : var.image
    dispatcher_image    = var.dispatcher_image == null ? "" : var.dispatcher_image
    disk_gib            = var.disk_gib
    dispatcher_disk_gib = var.dispatcher_disk_gib
    disk_key            = var.disk_key == null ? "" : var.disk_key
    launch_template     = { id = aws_launch_template.host.id, version = tostring(aws_launch_template.host.latest_version) }
    dispatcher = var.dispatcher == null ? null : {
      id         = aws_instance.dispatcher[0].id
      private_ip = aws_instance.dispatcher[0].private_ip
      public_ip  = aws_instance.dispatcher[0].public_ip
      disk       = aws_ebs_volume.dispatcher[0].id
    }
    worker_group = var.worker_group == null ? null : { kind = "autoscaling-group", id = aws_autoscaling_group.workers[0].name }
    tags         = { (local.base.tags.base) = var.name }
  }
}

# `spotfleet up --discover NAME` finds the base by this parameter's tag.
resource "aws_ssm_parameter" "contract" {
  name        = local.names.parameter
  description = "The spotfleet base ${var.name}, for the command line"
  type        = "String"
  value       = jsonencode(local.contract)
  tags        = local.tags
}

output "spotfleet" {
  description = "The contract with the command line: `spotfleet up FILE --from-terraform DIR` reads it. No part of it is secret."
  value       = local.contract
}

output "vpc_id" {
  description = "The VPC of the base."
  value       = local.vpc_id
}

output "subnet_ids" {
  description = "The subnets of the machines."
  value       = local.subnet_ids
}

output "security_group_ids" {
  description = "The security groups: `hosts` of every machine, `dispatcher` besides of the dispatcher."
  value       = { hosts = aws_security_group.hosts.id, dispatcher = aws_security_group.dispatcher.id }
}

output "instance_profiles" {
  description = "Names of the instance profiles of the dispatcher and of hosts."
  value       = { for role, profile in aws_iam_instance_profile.this : role => profile.name }
}

output "checkpoint_bucket" {
  description = "The bucket for checkpoints."
  value       = local.bucket
}
