# Image of hosts and dispatchers on Compute Engine. `spotfleet image build gcp` writes the values and runs Packer;
# docs/clouds/images.md.

variable "project" {
  type        = string
  description = "Project of the build machine and of the image."
}

variable "zone" {
  type        = string
  description = "Zone of the build machine."
}

variable "kind" {
  type        = string
  description = "gpu or cpu: the hosts that the image is for."
  validation {
    condition     = contains(["gpu", "cpu"], var.kind)
    error_message = "Write kind = \"gpu\" or kind = \"cpu\"."
  }
}

variable "base_family" {
  type        = string
  description = "Family of the base image. The newest one is taken."
}

variable "base_project" {
  type        = string
  description = "Project of the base image."
}

variable "tags" {
  type        = map(string)
  description = "Labels by which spotfleet finds the image."
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

variable "machine_type" {
  type        = string
  default     = "n2-standard-2"
  description = "Type of the build machine. Packages of GPUs are installed without a GPU."
}

variable "disk_gib" {
  type        = number
  default     = 60
  description = "Size of the image's disk."
}

source "googlecompute" "image" {
  project_id              = var.project
  zone                    = var.zone
  machine_type            = var.machine_type
  source_image_family     = var.base_family
  source_image_project_id = [var.base_project]
  disk_size               = var.disk_gib
  image_name              = "spotfleet-${var.kind}-${var.recipe}-${formatdate("YYYYMMDDhhmmss", timestamp())}"
  image_family            = "spotfleet-${var.kind}"
  image_description       = "Ready image of spotfleet"
  image_labels            = var.tags
  ssh_username            = "packer"

  metadata = {
    block-project-ssh-keys = "true"
  }
}

build {
  sources = ["source.googlecompute.image"]

  provisioner "file" {
    source      = "${path.root}/provision.sh"
    destination = "/tmp/provision.sh"
  }

  provisioner "file" {
    source      = "${path.root}/${var.wheel}"
    destination = "/tmp/${var.wheel}"
  }

  provisioner "shell" {
    inline     = ["sudo bash /tmp/provision.sh --wheel /tmp/${var.wheel} --extras train,gcp ${var.options} --seal"]
    skip_clean = true
  }
}
