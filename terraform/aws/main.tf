# The long-lived base of spotfleet's fleets on AWS: network, firewall, roles, bucket, queue and launch template.
#
#   network.tf        VPC, subnets, way out               interruptions.tf  EventBridge -> SQS
#   firewall.tf       security groups                     machines.tf       launch template
#   roles.tf          roles, profiles, their boundary     dispatcher.tf     optional machine with a disk of its own
#   checkpoints.tf    bucket                              worker_group.tf   optional auto scaling group
#   outputs.tf        the contract with the command line  data/             rights and rules, made by spotfleet itself

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {
  lifecycle {
    postcondition {
      condition     = self.id == var.region
      error_message = "The provider's region is ${self.id}, but region = \"${var.region}\". Write the same region in both."
    }
  }
}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition

  # Rights, rules and names that the command line uses, too. `python -m spotfleet.providers.aws.base` writes the file.
  base = jsondecode(templatefile("${path.module}/data/base.json", {
    name           = var.name
    region         = var.region
    account        = local.account
    partition      = local.partition
    bucket         = local.bucket
    prefix         = var.checkpoint_prefix
    disk_key       = try(split("/", var.disk_key)[1], "")
    disk_account   = try(split(":", var.disk_key)[4], "")
    bucket_key     = try(split("/", var.bucket_key)[1], "")
    bucket_account = try(split(":", var.bucket_key)[4], "")
  }))

  names = local.base.names

  tags = merge(var.tags, {
    (local.base.tags.base)    = var.name
    (local.base.tags.manager) = "terraform"
  })
}
