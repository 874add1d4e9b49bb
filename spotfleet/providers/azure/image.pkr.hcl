# Image of hosts and dispatchers on Azure, as a managed image. Run Packer by hand: spotfleet has no provider for Azure yet;
# docs/clouds/images.md.

variable "subscription" {
  type        = string
  description = "Subscription of the build machine and of the image."
}

variable "resource_group" {
  type        = string
  description = "Existing resource group of the image."
}

variable "location" {
  type        = string
  description = "Location of the build machine and of the image."
}

variable "kind" {
  type        = string
  description = "gpu or cpu: the hosts that the image is for."
  validation {
    condition     = contains(["gpu", "cpu"], var.kind)
    error_message = "Write kind = \"gpu\" or kind = \"cpu\"."
  }
}

variable "base_publisher" {
  type        = string
  default     = "Canonical"
  description = "Publisher of the base image; microsoft-dsvm for one with a driver."
}

variable "base_offer" {
  type        = string
  default     = "ubuntu-24_04-lts"
  description = "Offer of the base image; ubuntu-hpc for one with a driver."
}

variable "base_sku" {
  type        = string
  default     = "server"
  description = "SKU of the base image; 2404 for one with a driver."
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

variable "vm_size" {
  type        = string
  default     = "Standard_D2s_v5"
  description = "Size of the build machine. Packages of GPUs are installed without a GPU."
}

variable "disk_gib" {
  type        = number
  default     = 60
  description = "Size of the image's disk."
}

source "azure-arm" "image" {
  use_azure_cli_auth                = true
  subscription_id                   = var.subscription
  location                          = var.location
  vm_size                           = var.vm_size
  os_type                           = "Linux"
  os_disk_size_gb                   = var.disk_gib
  image_publisher                   = var.base_publisher
  image_offer                       = var.base_offer
  image_sku                         = var.base_sku
  managed_image_resource_group_name = var.resource_group
  managed_image_name                = "spotfleet-${var.kind}-${var.recipe}-${formatdate("YYYYMMDDhhmmss", timestamp())}"
  azure_tags                        = var.tags
}

build {
  sources = ["source.azure-arm.image"]

  provisioner "file" {
    source      = "${path.root}/provision.sh"
    destination = "/tmp/provision.sh"
  }

  provisioner "file" {
    source      = "${path.root}/${var.wheel}"
    destination = "/tmp/${var.wheel}"
  }

  provisioner "shell" {
    inline = [
      "sudo sh -c 'bash /tmp/provision.sh --wheel /tmp/${var.wheel} --extras train,azure ${var.options} --seal && waagent -force -deprovision+user && sync'",
    ]
    skip_clean = true
  }
}
