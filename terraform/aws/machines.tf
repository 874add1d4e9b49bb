# A host as the command line launches it. It has no market options: a launch or a group adds them.
resource "aws_launch_template" "host" {
  name        = local.names.template
  description = "Hosts of fleets on the spotfleet base ${var.name}"
  image_id    = try(var.worker_group.image, var.image)
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
    device_name = "/dev/sda1"

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
