variable "name" {
  description = "Name of the base, 2 to 16 characters such as `research`. It is part of every name here, and the tag `spotfleet-base` of everything."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,14}[a-z0-9]$", var.name))
    error_message = "name is '${var.name}': write 2 to 16 small letters, digits and -, a letter first and no - at the end, such as \"research\"."
  }
}

variable "region" {
  description = "Region of the base, such as `eastus`. Required."
  type        = string
  default     = null

  validation {
    condition     = can(regex("^[a-z]+[0-9]?$", var.region))
    error_message = var.region == null || var.region == "" ? "region is missing: write one such as \"eastus\"; `az account list-locations --output table` shows them." : "region is '${coalesce(var.region, "?")}': write the short name of a region such as \"eastus\", without spaces or capitals."
  }
}

variable "resource_group" {
  description = "Existing resource group for everything that is made. Null: one is made. The dispatcher may make and delete machines in it, so it should hold nothing else."
  type        = string
  default     = null

  validation {
    condition     = var.resource_group == null || can(regex("^[A-Za-z0-9_().-]{0,89}[A-Za-z0-9_()-]$", var.resource_group))
    error_message = "resource_group is '${var.resource_group == null ? "" : var.resource_group}': write the name of a resource group such as \"training\", or leave it out to have one made."
  }
}

variable "zones" {
  description = "Availability zones of the optional dispatcher (the first) and worker group (all), such as `[\"1\", \"2\"]`. Empty: Azure's choice."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for zone in var.zones : contains(["1", "2", "3"], zone)])
    error_message = "zones are ${join(", ", var.zones)}: write numbers of zones, such as [\"1\", \"2\"]."
  }
}

variable "network" {
  description = "Id of an existing virtual network, whose `subnets` has a way out of its own. Null: one is made, with a private subnet and a NAT gateway."
  type        = string
  default     = null

  validation {
    condition     = var.network == null || can(regex("^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Network/virtualNetworks/[^/]+$", var.network))
    error_message = "network is '${var.network == null ? "" : var.network}': write /subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Network/virtualNetworks/NAME, or leave it out to have one made."
  }
}

variable "subnets" {
  description = "Id of the subnet of an existing `network`, as `[\".../virtualNetworks/NAME/subnets/NAME\"]`. One: it spans all zones. Its security group stays as it is."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(var.subnets) == (var.network == null ? 0 : 1)
    error_message = var.network == null ? "subnets are given without network: write the network that they are in, too, or leave both out to have them made." : "subnets has ${length(var.subnets)} entries: write the id of one subnet of the network, such as [\"${var.network == null ? "" : var.network}/subnets/training\"]."
  }

  validation {
    condition     = alltrue([for subnet in var.subnets : startswith(subnet, "${var.network == null ? "" : var.network}/subnets/")])
    error_message = "subnets is ${join(", ", var.subnets)}: write the id of a subnet of the network, which begins with the network's id and /subnets/."
  }
}

variable "cidr" {
  description = "Addresses of the network that is made, such as `10.60.0.0/20`: room for 4,091 machines."
  type        = string
  default     = "10.60.0.0/20"
  nullable    = false

  validation {
    condition     = try(cidrsubnet(var.cidr, 0, 0) == var.cidr && tonumber(split("/", var.cidr)[1]) >= 8 && tonumber(split("/", var.cidr)[1]) <= 28, false)
    error_message = "cidr is '${var.cidr}': write a network of /8 to /28 whose address ends in zero bits, such as \"10.60.0.0/20\"."
  }

  validation {
    condition     = can(regex("^(10\\.|172\\.(1[6-9]|2[0-9]|3[01])\\.|192\\.168\\.)", var.cidr))
    error_message = "cidr is '${var.cidr}', which is no private network: write one of 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16, such as \"10.60.0.0/20\"."
  }
}

variable "public_addresses" {
  description = "Whether machines get public addresses. False: they leave through the NAT gateway, and you reach the dispatcher through a VPN or the like."
  type        = bool
  default     = false
  nullable    = false

  validation {
    condition     = !var.public_addresses || length(var.ssh_cidrs) > 0
    error_message = "public_addresses is true and ssh_cidrs is empty, so nobody could reach the dispatcher: write the networks that you come from, such as ssh_cidrs = [\"203.0.113.0/24\"]."
  }
}

variable "ssh_cidrs" {
  description = "Networks that may reach port 22 of dispatchers, such as `[\"203.0.113.0/24\"]`. Empty: none. The whole internet is refused."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.ssh_cidrs : can(cidrnetmask(cidr))])
    error_message = "ssh_cidrs is ${join(", ", var.ssh_cidrs)}: write networks of IPv4 such as [\"203.0.113.0/24\"], or one address as [\"203.0.113.7/32\"]."
  }

  validation {
    condition     = alltrue([for cidr in var.ssh_cidrs : try(tonumber(split("/", cidr)[1]) >= 8, true)])
    error_message = "ssh_cidrs is ${join(", ", var.ssh_cidrs)}, which opens SSH to the world: write the networks that you come from, such as [\"203.0.113.0/24\"]."
  }
}

variable "bucket" {
  description = "Id of an existing storage container for checkpoints, as `/subscriptions/.../storageAccounts/NAME/blobServices/default/containers/NAME`. Null: one is made."
  type        = string
  default     = null

  validation {
    condition     = var.bucket == null || can(regex("^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Storage/storageAccounts/[a-z0-9]{3,24}/blobServices/default/containers/[a-z0-9-]{3,63}$", var.bucket))
    error_message = "bucket is '${var.bucket == null ? "" : var.bucket}': write /subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Storage/storageAccounts/NAME/blobServices/default/containers/NAME, or leave it out to have one made."
  }
}

variable "checkpoint_prefix" {
  description = "Folder in the container that fleets write to, such as `spotfleet`."
  type        = string
  default     = "spotfleet"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$", var.checkpoint_prefix))
    error_message = "checkpoint_prefix is '${var.checkpoint_prefix}': write a folder such as \"spotfleet\" or \"teams/vision\", without / at either end."
  }
}

variable "checkpoint_days" {
  description = "Days after which checkpoints are deleted, such as `90`. 0: never. Deleted and overwritten ones stay for 7 days more."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.checkpoint_days >= 0 && floor(var.checkpoint_days) == var.checkpoint_days
    error_message = "checkpoint_days is ${var.checkpoint_days}: write a whole number of days such as 90, or 0 to keep checkpoints."
  }
}

variable "disk_key" {
  description = "Id of a disk encryption set with your key, as `/subscriptions/.../diskEncryptionSets/NAME`. Empty: Azure's own keys; nothing is ever unencrypted."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.disk_key == "" || can(regex("^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Compute/diskEncryptionSets/[^/]+$", var.disk_key))
    error_message = "disk_key is '${var.disk_key}': write /subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Compute/diskEncryptionSets/NAME, or leave it out for Azure's own keys."
  }
}

variable "image" {
  description = "Id of the image of hosts, as `/subscriptions/.../images/NAME`. Empty: Ubuntu 24.04."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.image == "" || can(regex("^(/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Compute|/communityGalleries/[^/]+|/sharedGalleries/[^/]+)/(galleries/[^/]+/)?images/.+$", var.image))
    error_message = "image is '${var.image}': write /subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Compute/images/NAME, or the id of an image in a gallery."
  }
}

variable "dispatcher_image" {
  description = "Id of the image of dispatchers, in the same form. Empty: Ubuntu 24.04."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.dispatcher_image == "" || can(regex("^(/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Compute|/communityGalleries/[^/]+|/sharedGalleries/[^/]+)/(galleries/[^/]+/)?images/.+$", var.dispatcher_image))
    error_message = "dispatcher_image is '${var.dispatcher_image}': write /subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Compute/images/NAME, or the id of an image in a gallery."
  }
}

variable "disk_gib" {
  description = "GiB of a host's system disk, such as `100`."
  type        = number
  default     = 100
  nullable    = false

  validation {
    condition     = var.disk_gib >= 30 && var.disk_gib <= 4095 && floor(var.disk_gib) == var.disk_gib
    error_message = "disk_gib is ${var.disk_gib}: write a whole number of GiB from 30 to 4095, such as 100."
  }
}

variable "dispatcher_disk_gib" {
  description = "GiB of a dispatcher's system disk, such as `30`."
  type        = number
  default     = 30
  nullable    = false

  validation {
    condition     = var.dispatcher_disk_gib >= 30 && var.dispatcher_disk_gib <= 4095 && floor(var.dispatcher_disk_gib) == var.dispatcher_disk_gib
    error_message = "dispatcher_disk_gib is ${var.dispatcher_disk_gib}: write a whole number of GiB from 30 to 4095, such as 30."
  }
}

variable "dispatcher" {
  description = "A dispatcher's machine that Terraform keeps, with a disk of its own for its state, such as `{ ssh_public_key = \"ssh-ed25519 AAAA...\" }`. Null: none."
  type = object({
    ssh_public_key = string
    size           = optional(string, "Standard_B2s_v2")
    state_disk_gib = optional(number, 50)
    user           = optional(string, "ubuntu")
  })
  default = null

  validation {
    condition     = var.dispatcher == null || can(regex("^(ssh-ed25519|ssh-rsa) [A-Za-z0-9+/=]+( .*)?$", var.dispatcher.ssh_public_key))
    error_message = "dispatcher.ssh_public_key is no public key: write the line of a .pub file, such as \"ssh-ed25519 AAAA... you@laptop\"."
  }

  validation {
    condition     = var.dispatcher == null || try(var.dispatcher.state_disk_gib >= 4 && var.dispatcher.state_disk_gib <= 32767, false)
    error_message = "dispatcher.state_disk_gib is ${try(var.dispatcher.state_disk_gib, 0)}: write a number of GiB from 4 to 32767, such as 50."
  }

  validation {
    condition     = var.dispatcher == null || can(regex("^[a-z_][a-z0-9_-]{0,31}$", var.dispatcher.user)) && !contains(["root", "admin"], try(var.dispatcher.user, ""))
    error_message = "dispatcher.user is '${try(var.dispatcher.user, "")}': write a login name such as \"ubuntu\"; Azure refuses root and admin."
  }
}

variable "worker_group" {
  description = "A scale set of Spot machines for `provider: ssh`, such as `{ hosts = 4, gpu = \"T4\", ssh_public_key = \"ssh-ed25519 AAAA...\" }`. Null: none."
  type = object({
    hosts          = number
    ssh_public_key = string
    gpu            = optional(string)
    size           = optional(string)
    spot           = optional(bool, true)
    user           = optional(string, "ubuntu")
  })
  default = null

  validation {
    condition     = var.worker_group == null || try(var.worker_group.hosts >= 1 && var.worker_group.hosts <= 100 && floor(var.worker_group.hosts) == var.worker_group.hosts, false)
    error_message = "worker_group.hosts is ${try(var.worker_group.hosts, 0)}: write a whole number from 1 to 100, or leave worker_group out to have no group."
  }

  validation {
    condition     = var.worker_group == null || try(var.worker_group.gpu == null || contains(keys(jsondecode(file("${path.module}/data/gpus.json"))), var.worker_group.gpu), false)
    error_message = "worker_group.gpu is '${try(coalesce(var.worker_group.gpu, "null"), "")}', which is unknown: write one of ${join(", ", keys(jsondecode(file("${path.module}/data/gpus.json"))))}, or a size such as size = \"Standard_NC4as_T4_v3\" instead."
  }

  validation {
    condition     = var.worker_group == null || try((var.worker_group.gpu == null) != (var.worker_group.size == null), false)
    error_message = "worker_group has gpu and size, or neither: write one of them, such as gpu = \"T4\" or size = \"Standard_D4s_v5\"."
  }

  validation {
    condition     = var.worker_group == null || try(var.worker_group.gpu == null || var.image != "", false)
    error_message = "worker_group.gpu is given without image, and Azure's Ubuntu has no driver for GPUs: write image = \"/subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Compute/images/NAME\" of an image that has one, or size in place of gpu to install the driver yourself."
  }

  validation {
    condition     = var.worker_group == null || try(var.worker_group.size == null || can(regex("^Standard_[A-Za-z0-9_]+$", var.worker_group.size)), false)
    error_message = "worker_group.size is '${try(coalesce(var.worker_group.size, "null"), "")}': write a size such as \"Standard_D4s_v5\"; `az vm list-sizes --location REGION` shows them."
  }

  validation {
    condition     = var.worker_group == null || can(regex("^(ssh-ed25519|ssh-rsa) [A-Za-z0-9+/=]+( .*)?$", var.worker_group.ssh_public_key))
    error_message = "worker_group.ssh_public_key is no public key: write the line of a .pub file, such as \"ssh-ed25519 AAAA... you@laptop\"."
  }

  validation {
    condition     = var.worker_group == null || can(regex("^[a-z_][a-z0-9_-]{0,31}$", var.worker_group.user)) && !contains(["root", "admin"], try(var.worker_group.user, ""))
    error_message = "worker_group.user is '${try(var.worker_group.user, "")}': write a login name such as \"ubuntu\"; Azure refuses root and admin."
  }
}

variable "tags" {
  description = "Tags on everything that can have them, such as `{ team = \"vision\" }`."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for key, value in var.tags : can(regex("^[^<>%&\\\\?/]{1,512}$", key)) && length(value) <= 256])
    error_message = "tags has ${jsonencode(var.tags)}: write keys without < > % & \\ ? / and values of up to 256 characters, such as { team = \"vision\" }."
  }

  validation {
    condition     = alltrue([for key in keys(var.tags) : !startswith(lower(key), "spotfleet")])
    error_message = "tags has ${join(", ", keys(var.tags))}: keys that begin with spotfleet are our own; write another key."
  }
}
