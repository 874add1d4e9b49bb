locals {
  host_image = try(var.worker_group.image, var.image)
}

# Images call their root disk /dev/sda1 or /dev/xvda. By the wrong name a host would get a second disk, and an unencrypted root.
data "aws_ami" "host" {
  count              = local.host_image == null ? 0 : 1
  include_deprecated = true

  filter {
    name   = "image-id"
    values = [local.host_image]
  }
}

# A host as the command line launches it. It has no market options: a launch or a group adds them.
resource "aws_launch_template" "host" {
  name        = local.names.template
  description = "Hosts of fleets on the spotfleet base ${var.name}"
  image_id    = local.host_image
  key_name    = try(var.worker_group.key_pair, null)

  iam_instance_profile {
    arn = aws_iam_instance_profile.this["host"].arn
  }

  metadata_options {
    http_endpoint               = local.base.machine.metadata.HttpEndpoint
    http_tokens                 = local.base.machine.metadata.HttpTokens
    http_put_response_hop_limit = local.base.machine.metadata.HttpPutResponseHopLimit
    instance_metadata_tags      = local.base.machine.metadata.InstanceMetadataTags
  }

  block_device_mappings {
    device_name = local.host_image == null ? "/dev/sda1" : data.aws_ami.host[0].root_device_name

    ebs {
      volume_size           = var.disk_gib
      volume_type           = local.base.machine.volume.VolumeType
      encrypted             = local.base.machine.volume.Encrypted
      delete_on_termination = local.base.machine.volume.DeleteOnTermination
      kms_key_id            = var.disk_key
    }
  }

  network_interfaces {
    device_index                = 0
    security_groups             = [aws_security_group.hosts.id]
    associate_public_ip_address = var.public_addresses
    delete_on_termination       = true
  }

  dynamic "tag_specifications" {
    for_each = local.base.machine.tagged

    content {
      resource_type = tag_specifications.value
      tags          = local.tags
    }
  }

  tags = local.tags
}
