# A dispatcher that outlives fleets. Its data is on a disk of its own, which stays when the machine is replaced. Of a disk
# that is destroyed a snapshot stays.

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

  # The volume's id is part of the device's name: Nitro numbers disks as it finds them.
  user_data = templatefile("${path.module}/data/dispatcher.cloud-config.tftpl", {
    device = "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_${replace(aws_ebs_volume.dispatcher[0].id, "-", "")}"
    user   = var.dispatcher.user
  })

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

  lifecycle {
    # A newer image replaces no machine. A stopped machine has no public address, which must not replace it either.
    ignore_changes = [ami, associate_public_ip_address]
  }
}

resource "aws_ebs_volume" "dispatcher" {
  count             = var.dispatcher == null ? 0 : 1
  availability_zone = data.aws_subnet.dispatcher[0].availability_zone
  size              = var.dispatcher.data_disk_gib
  type              = local.base.machine.volume.VolumeType
  encrypted         = true
  kms_key_id        = var.disk_key
  final_snapshot    = true
  tags              = merge(local.tags, { Name = "${local.names.base}-dispatcher" })
}

resource "aws_volume_attachment" "dispatcher" {
  count                          = var.dispatcher == null ? 0 : 1
  device_name                    = "/dev/sdf"
  volume_id                      = aws_ebs_volume.dispatcher[0].id
  instance_id                    = aws_instance.dispatcher[0].id
  stop_instance_before_detaching = true # a mounted disk would never be detached
}
