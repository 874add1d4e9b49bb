# A dispatcher that outlives fleets. Its data is on a disk of its own, which stays when the machine is replaced.

data "aws_subnet" "dispatcher" {
  count = var.dispatcher == null ? 0 : 1
  id    = local.subnet_ids[0]
}

resource "aws_instance" "dispatcher" {
  count = var.dispatcher == null ? 0 : 1

  ami                         = var.dispatcher.image
  instance_type               = var.dispatcher.instance_type
  key_name                    = var.dispatcher.key_pair
  subnet_id                   = local.subnet_ids[0]
  vpc_security_group_ids      = [aws_security_group.hosts.id, aws_security_group.dispatcher.id]
  iam_instance_profile        = aws_iam_instance_profile.this["dispatcher"].name
  associate_public_ip_address = var.public_addresses

  metadata_options {
    http_endpoint               = local.base.machine.metadata.HttpEndpoint
    http_tokens                 = local.base.machine.metadata.HttpTokens
    http_put_response_hop_limit = local.base.machine.metadata.HttpPutResponseHopLimit
  }

  root_block_device {
    volume_size = var.dispatcher_disk_gib
    volume_type = local.base.machine.volume.VolumeType
    encrypted   = true
    kms_key_id  = var.disk_key
  }

  tags = merge(local.tags, { Name = "${local.names.base}-dispatcher" })
}

resource "aws_ebs_volume" "dispatcher" {
  count             = var.dispatcher == null ? 0 : 1
  availability_zone = data.aws_subnet.dispatcher[0].availability_zone
  size              = var.dispatcher.data_disk_gib
  type              = local.base.machine.volume.VolumeType
  encrypted         = true
  kms_key_id        = var.disk_key
  tags              = merge(local.tags, { Name = "${local.names.base}-dispatcher" })
}

resource "aws_volume_attachment" "dispatcher" {
  count       = var.dispatcher == null ? 0 : 1
  device_name = "/dev/sdf"
  volume_id   = aws_ebs_volume.dispatcher[0].id
  instance_id = aws_instance.dispatcher[0].id
}
