# Image of hosts and dispatchers on EC2. `spotfleet image build aws` writes the values and runs Packer; docs/clouds/images.md.

variable "region" {
  type        = string
  description = "Region of the build machine and of the image."
}

variable "kind" {
  type        = string
  description = "gpu or cpu: the hosts that the image is for."
  validation {
    condition     = contains(["gpu", "cpu"], var.kind)
    error_message = "Write kind = \"gpu\" or kind = \"cpu\"."
  }
}

variable "base_name" {
  type        = string
  description = "Name of the base image; * stands for any text. The newest one is taken."
}

variable "base_owner" {
  type        = string
  description = "Account that owns the base image."
}

variable "tags" {
  type        = map(string)
  description = "Tags by which spotfleet finds the image."
}

variable "recipe" {
  type        = string
  description = "Version of what the image has; part of its name."
}

variable "wheel" {
  type        = string
  description = "File name of spotfleet's wheel, beside this template."
}

variable "options" {
  type        = string
  description = "Further options of provision.sh."
}

variable "ssh_from" {
  type        = list(string)
  description = "Networks from which Packer reaches the build machine, as [\"203.0.113.7/32\"]."
}

variable "instance_type" {
  type        = string
  default     = "m5.large"
  description = "Type of the build machine. Packages of GPUs are installed without a GPU."
}

variable "disk_gib" {
  type        = number
  default     = 60
  description = "Size of the image's disk."
}

variable "efa_version" {
  type        = string
  default     = ""
  description = "Version of the EFA installer, for a base image without EFA; empty: none is installed."
}

variable "efa_sha256" {
  type        = string
  default     = ""
  description = "SHA-256 of that installer's archive."
}

source "amazon-ebs" "image" {
  region                                = var.region
  instance_type                         = var.instance_type
  ami_name                              = "spotfleet-${var.kind}-${var.recipe}-${formatdate("YYYYMMDDhhmmss", timestamp())}"
  ami_description                       = "Ready image of spotfleet"
  encrypt_boot                          = true
  ssh_username                          = "ubuntu"
  temporary_security_group_source_cidrs = var.ssh_from
  tags                                  = var.tags
  snapshot_tags                         = var.tags
  run_tags                              = { Name = "spotfleet image build" }

  source_ami_filter {
    filters = {
      name                = var.base_name
      architecture        = "x86_64"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
    owners      = [var.base_owner]
    most_recent = true
  }

  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_size           = var.disk_gib
    volume_type           = "gp3"
    iops                  = 3000
    throughput            = 250
    delete_on_termination = true
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
}

build {
  sources = ["source.amazon-ebs.image"]

  provisioner "file" {
    source      = "${path.root}/provision.sh"
    destination = "/tmp/provision.sh"
  }

  provisioner "file" {
    source      = "${path.root}/efa.sh"
    destination = "/tmp/efa.sh"
  }

  provisioner "file" {
    source      = "${path.root}/${var.wheel}"
    destination = "/tmp/${var.wheel}"
  }

  provisioner "shell" {
    inline = ["sudo bash /tmp/efa.sh '${var.efa_version}' '${var.efa_sha256}'"]
  }

  provisioner "shell" {
    inline     = ["sudo bash /tmp/provision.sh --wheel /tmp/${var.wheel} --extras train,aws ${var.options} --seal"]
    skip_clean = true
  }
}
