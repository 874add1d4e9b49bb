variable "name" {
  description = "Name of the base, 2 to 16 characters such as `research`. It is part of every name here; `spotfleet up --discover NAME` finds the base by it."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,14}[a-z0-9]$", var.name))
    error_message = "name is '${var.name}': write 2 to 16 small letters, digits and -, a letter first and no - at the end, such as \"research\"."
  }
}

variable "project" {
  description = "Id of the project, such as `my-project-123`."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "project is '${var.project}': write the id of a project such as \"my-project-123\"; `gcloud projects list` shows them."
  }
}

variable "region" {
  description = "Region of the base, such as `us-central1`. A fleet on it stays in this region. Required."
  type        = string
  default     = null

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = var.region == null || var.region == "" ? "region is missing: write one such as \"us-central1\"; `gcloud compute regions list` shows them." : "region is '${coalesce(var.region, "?")}': write a region such as \"us-central1\", without the letter of a zone."
  }
}

variable "zones" {
  description = "Zones of the optional dispatcher (the first) and worker group (all), such as `[\"us-central1-a\"]`. Empty: Google's choice for the group, REGION-b for the dispatcher."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for zone in var.zones : can(regex("^${var.region}-[a-z]$", zone))])
    error_message = "zones are ${join(", ", var.zones)}: write zones of ${var.region}, such as [\"${var.region}-a\"]."
  }
}

variable "network" {
  description = "Existing network: its name, or `projects/HOST/global/networks/NAME` of a shared VPC. Null: one is made, with a private subnet and Cloud NAT."
  type        = string
  default     = null

  validation {
    condition     = var.network == null || can(regex("^(projects/[a-z0-9.:-]+/global/networks/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?$", var.network))
    error_message = "network is '${var.network == null ? "" : var.network}': write the name of a network, or projects/HOST/global/networks/NAME, or leave it out to have one made."
  }
}

variable "subnets" {
  description = "Subnet of an existing `network` in `region`, as `[\"projects/PROJECT/regions/REGION/subnetworks/NAME\"]` or its name alone. One: it spans all zones of its region."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(var.subnets) == (var.network == null ? 0 : 1)
    error_message = var.network == null ? "subnets are given without network: write the network that they are in, too, or leave both out to have them made." : "subnets has ${length(var.subnets)} entries: write the one subnet of the network in ${var.region}, such as [\"training\"]."
  }

  validation {
    condition     = alltrue([for subnet in var.subnets : can(regex("^(projects/[a-z0-9.:-]+/regions/${var.region}/subnetworks/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?$", subnet))])
    error_message = "subnets is ${join(", ", var.subnets)}: write a name such as \"training\", or projects/PROJECT/regions/${var.region}/subnetworks/NAME."
  }
}

variable "cidr" {
  description = "Addresses of the subnet that is made, such as `10.60.0.0/20`: room for 4,092 machines."
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
  description = "Whether machines get public addresses. False: they leave through Cloud NAT, and you reach the dispatcher through a VPN or the like."
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
  description = "Existing bucket of this project for checkpoints, with uniform bucket-level access, such as `acme-checkpoints`. Null: one is made."
  type        = string
  default     = null

  validation {
    condition     = var.bucket == null || can(regex("^[a-z0-9][a-z0-9_.-]{1,220}[a-z0-9]$", var.bucket))
    error_message = "bucket is '${var.bucket == null ? "" : var.bucket}': write the name of a bucket without gs://, such as \"acme-checkpoints\"."
  }
}

variable "checkpoint_prefix" {
  description = "Folder in the bucket that fleets write to, such as `spotfleet`. Hosts may read and write nothing else there."
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
  description = "Cloud KMS key for disks and bucket, as `projects/P/locations/L/keyRings/R/cryptoKeys/K`. Empty: Google's own keys; nothing is ever unencrypted."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.disk_key == "" || can(regex("^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$", var.disk_key))
    error_message = "disk_key is '${var.disk_key}': write projects/P/locations/L/keyRings/R/cryptoKeys/K, or leave it out for Google's own keys."
  }
}

variable "image" {
  description = "Image of hosts, as `projects/PROJECT/global/images/family/FAMILY` or `.../images/NAME`. Empty: Deep Learning VM with a GPU, else Ubuntu 24.04."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.image == "" || can(regex("^projects/[a-z0-9.:-]+/global/images/(family/)?[a-z][a-z0-9-]*$", var.image))
    error_message = "image is '${var.image}': write projects/PROJECT/global/images/NAME or projects/PROJECT/global/images/family/FAMILY."
  }
}

variable "dispatcher_image" {
  description = "Image of dispatchers, in the same form. Empty: Ubuntu 24.04."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.dispatcher_image == "" || can(regex("^projects/[a-z0-9.:-]+/global/images/(family/)?[a-z][a-z0-9-]*$", var.dispatcher_image))
    error_message = "dispatcher_image is '${var.dispatcher_image}': write projects/PROJECT/global/images/NAME or projects/PROJECT/global/images/family/FAMILY."
  }
}

variable "disk_gib" {
  description = "GiB of a host's boot disk, such as `100`."
  type        = number
  default     = 100
  nullable    = false

  validation {
    condition     = var.disk_gib >= 10 && var.disk_gib <= 65536 && floor(var.disk_gib) == var.disk_gib
    error_message = "disk_gib is ${var.disk_gib}: write a whole number of GiB from 10 to 65536, such as 100."
  }
}

variable "dispatcher_disk_gib" {
  description = "GiB of a dispatcher's boot disk, such as `30`."
  type        = number
  default     = 30
  nullable    = false

  validation {
    condition     = var.dispatcher_disk_gib >= 10 && var.dispatcher_disk_gib <= 65536 && floor(var.dispatcher_disk_gib) == var.dispatcher_disk_gib
    error_message = "dispatcher_disk_gib is ${var.dispatcher_disk_gib}: write a whole number of GiB from 10 to 65536, such as 30."
  }
}

variable "machine_type" {
  description = "Machine type of the instance template, such as `g2-standard-4` (with one L4). A fleet file names its own types."
  type        = string
  default     = "g2-standard-4"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9]+-[a-z0-9-]+$", var.machine_type))
    error_message = "machine_type is '${var.machine_type}': write a type such as \"g2-standard-4\" or \"n1-standard-8\"; `gcloud compute machine-types list` shows them."
  }
}

variable "gpu" {
  description = "GPUs attached to an N1 `machine_type`, such as `{ type = \"nvidia-tesla-t4\", count = 1 }`. Null for all other types: their GPUs are part of the type."
  type = object({
    type  = string
    count = optional(number, 1)
  })
  default = null

  validation {
    condition     = var.gpu == null || contains(["nvidia-tesla-p100", "nvidia-tesla-p4", "nvidia-tesla-t4", "nvidia-tesla-v100"], try(var.gpu.type, ""))
    error_message = "gpu.type is '${try(var.gpu.type, "")}', which cannot be attached: write nvidia-tesla-t4, nvidia-tesla-v100, nvidia-tesla-p100 or nvidia-tesla-p4; others are part of a machine type, such as machine_type = \"g2-standard-4\" for an L4."
  }

  validation {
    condition     = var.gpu == null || contains([1, 2, 4, 8], try(var.gpu.count, 0))
    error_message = "gpu.count is ${try(var.gpu.count, 0)}: write 1, 2, 4 or 8."
  }

  validation {
    condition     = var.gpu == null || startswith(var.machine_type, "n1-")
    error_message = "gpu is given with machine_type '${var.machine_type}': write an N1 type such as machine_type = \"n1-standard-8\", or leave gpu out."
  }
}

variable "operators" {
  description = "Who may run `spotfleet` on this base, such as `[\"group:ml@example.com\"]`: they get the role of `spotfleet check gcp --policy laptop`."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for member in var.operators : can(regex("^(user|group|serviceAccount|domain|principal|principalSet):.+$", member))])
    error_message = "operators is ${join(", ", var.operators)}: write members such as [\"user:you@example.com\", \"group:ml@example.com\"]; allUsers is refused."
  }
}

variable "dispatcher" {
  description = "A dispatcher's machine that Terraform keeps, with a disk of its own for its state, such as `{ ssh_public_key = \"ssh-ed25519 AAAA...\" }`. Null: `spotfleet up` makes one for each fleet."
  type = object({
    ssh_public_key = string
    machine_type   = optional(string, "e2-medium")
    state_disk_gib = optional(number, 50)
    user           = optional(string, "ubuntu")
  })
  default = null

  validation {
    condition     = var.dispatcher == null || can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)) [A-Za-z0-9+/=]+( .*)?$", var.dispatcher.ssh_public_key))
    error_message = "dispatcher.ssh_public_key is no public key: write the line of a .pub file, such as \"ssh-ed25519 AAAA... you@laptop\"."
  }

  validation {
    condition     = var.dispatcher == null || try(var.dispatcher.state_disk_gib >= 10 && var.dispatcher.state_disk_gib <= 65536, false)
    error_message = "dispatcher.state_disk_gib is ${try(var.dispatcher.state_disk_gib, 0)}: write a number of GiB from 10 to 65536, such as 50."
  }

  validation {
    condition     = var.dispatcher == null || can(regex("^[a-z_][a-z0-9_-]{0,31}$", var.dispatcher.user))
    error_message = "dispatcher.user is '${try(var.dispatcher.user, "")}': write a login name such as \"ubuntu\"."
  }
}

variable "worker_group" {
  description = "A managed instance group of machines for `provider: ssh`, such as `{ hosts = 4, ssh_public_key = \"ssh-ed25519 AAAA...\" }`. Null: the dispatcher launches hosts, which is better on spot."
  type = object({
    hosts          = number
    ssh_public_key = string
    spot           = optional(bool, true)
    user           = optional(string, "ubuntu")
  })
  default = null

  validation {
    condition     = var.worker_group == null || try(var.worker_group.hosts >= 1 && var.worker_group.hosts <= 1000 && floor(var.worker_group.hosts) == var.worker_group.hosts, false)
    error_message = "worker_group.hosts is ${try(var.worker_group.hosts, 0)}: write a whole number from 1 to 1000, or leave worker_group out to have no group."
  }

  validation {
    condition     = var.worker_group == null || can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)) [A-Za-z0-9+/=]+( .*)?$", var.worker_group.ssh_public_key))
    error_message = "worker_group.ssh_public_key is no public key: write the line of a .pub file, such as \"ssh-ed25519 AAAA... you@laptop\"."
  }

  validation {
    condition     = var.worker_group == null || can(regex("^[a-z_][a-z0-9_-]{0,31}$", var.worker_group.user))
    error_message = "worker_group.user is '${try(var.worker_group.user, "")}': write a login name such as \"ubuntu\"."
  }
}

variable "labels" {
  description = "Labels on everything that can have them, such as `{ team = \"vision\" }`."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for key, value in var.labels : can(regex("^[a-z][a-z0-9_-]{0,62}$", key)) && can(regex("^[a-z0-9_-]{0,63}$", value))])
    error_message = "labels has ${jsonencode(var.labels)}: write small letters, digits, - and _, a letter first in a key, up to 63 characters, such as { team = \"vision\" }."
  }

  validation {
    condition     = alltrue([for key in keys(var.labels) : !startswith(key, "spotfleet")])
    error_message = "labels has ${join(", ", keys(var.labels))}: keys that begin with spotfleet are our own; write another key."
  }
}
