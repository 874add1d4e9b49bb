# ---- what every base has

variable "name" {
  description = "Name of the base. Resources are called `spotfleet-NAME`, and `spotfleet up --discover NAME` finds them."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,22}[a-z0-9]$", var.name)) && !strcontains(var.name, "--")
    error_message = "Write 2 to 24 small letters, digits and single hyphens, a letter first and no hyphen last, such as name = \"research\"."
  }
}

variable "region" {
  description = "Region of the base, the same as that of the provider."
  type        = string
  default     = null

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]+$", var.region))
    error_message = "Name the region, such as region = \"us-east-1\". A zone such as us-east-1a is no region."
  }
}

variable "tags" {
  description = "Tags of every resource, besides those of the module."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for key in keys(var.tags) : !startswith(lower(key), "spotfleet") && !startswith(lower(key), "aws:")])
    error_message = "Names of tags that begin with \"spotfleet\" or \"aws:\" are reserved. Choose another name, such as tags = { team = \"vision\" }."
  }
}

# ---- network

variable "vpc_id" {
  description = "An existing VPC, which the module does not change. Then `subnet_ids` names its subnets. Default: a VPC is made."
  type        = string
  default     = null

  validation {
    condition     = var.vpc_id == null || can(regex("^vpc-[0-9a-f]{8,17}$", var.vpc_id))
    error_message = "Write the id of a VPC, such as vpc_id = \"vpc-0a1b2c3d4e5f67890\", or leave it out."
  }
}

variable "subnet_ids" {
  description = "Subnets of `vpc_id` for the machines. They need a way out: NAT, or an internet gateway with `public_addresses`."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for id in var.subnet_ids : can(regex("^subnet-[0-9a-f]{8,17}$", id))])
    error_message = "Write ids of subnets, such as subnet_ids = [\"subnet-0a1b2c3d4e5f67890\"]."
  }

  validation {
    condition     = (var.vpc_id == null) == (length(var.subnet_ids) == 0)
    error_message = "Name vpc_id and subnet_ids together for an existing network, or neither for a new one."
  }
}

variable "cidr" {
  description = "Addresses of the new VPC."
  type        = string
  default     = "10.64.0.0/16"
  nullable    = false

  validation {
    condition = can(cidrhost(var.cidr, 0)) && try(
      cidrhost(var.cidr, 0) == split("/", var.cidr)[0] && tonumber(split("/", var.cidr)[1]) >= 16 && tonumber(split("/", var.cidr)[1]) <= 22, false
    )
    error_message = "Write a network of IPv4 addresses with a prefix of /16 to /22 that begins at its first address, such as cidr = \"10.64.0.0/16\"."
  }
}

variable "zones" {
  description = "Number of zones of the new VPC. More zones are more pools of spot capacity; traffic between zones costs money."
  type        = number
  default     = 3
  nullable    = false

  validation {
    condition     = contains([1, 2, 3, 4, 5, 6], var.zones)
    error_message = "Write a number of zones from 1 to 6, such as zones = 3."
  }
}

variable "public_addresses" {
  description = "true: machines are in public subnets and have public addresses. false: private subnets with a NAT gateway; you reach the dispatcher by a VPN or from within the VPC."
  type        = bool
  default     = false
  nullable    = false
}

variable "ssh_cidrs" {
  description = "Networks that may reach port 22 of the dispatcher. Nothing else is open to the outside."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.ssh_cidrs : can(cidrhost(cidr, 0))])
    error_message = "Write networks, such as ssh_cidrs = [\"203.0.113.7/32\"]; a single address needs its /32."
  }

  validation {
    condition     = alltrue([for cidr in var.ssh_cidrs : !endswith(cidr, "/0")])
    error_message = "SSH from everywhere is refused. Name the networks that you come from, such as ssh_cidrs = [\"203.0.113.7/32\"]."
  }
}

# ---- checkpoints

variable "bucket" {
  description = "An existing bucket for checkpoints, which the module does not change. Default: one is made."
  type        = string
  default     = null

  validation {
    condition     = var.bucket == null || can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "Write the name of a bucket without s3://, such as bucket = \"acme-checkpoints\", or leave it out."
  }
}

variable "checkpoint_prefix" {
  description = "Folder of the bucket for checkpoints. Hosts get no access to anything else in it."
  type        = string
  default     = "spotfleet"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]*(/[A-Za-z0-9][A-Za-z0-9_-]*)*$", var.checkpoint_prefix))
    error_message = "Write a folder without a slash at its ends, such as checkpoint_prefix = \"spotfleet\"."
  }
}

variable "old_versions_days" {
  description = "Days for which the new bucket keeps deleted and overwritten checkpoints."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.old_versions_days >= 1 && floor(var.old_versions_days) == var.old_versions_days
    error_message = "Write whole days, 1 or more, such as old_versions_days = 7."
  }
}

variable "empty_bucket_on_destroy" {
  description = "true: `terraform destroy` deletes the new bucket with all checkpoints in it. false: it stops at a bucket that is not empty."
  type        = bool
  default     = false
  nullable    = false
}

variable "bucket_key" {
  description = "ARN of the KMS key that encrypts the bucket. Default: a key of S3."
  type        = string
  default     = null

  validation {
    condition     = var.bucket_key == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[0-9a-z-]+$", var.bucket_key))
    error_message = "Write the ARN of a key, such as bucket_key = \"arn:aws:kms:us-east-1:123456789012:key/1234abcd-...\". An alias does not suffice."
  }
}

# ---- machines

variable "disk_key" {
  description = "ARN of the KMS key that encrypts the disks. Disks are always encrypted; default: the account's key for EBS."
  type        = string
  default     = null

  validation {
    condition     = var.disk_key == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[0-9a-z-]+$", var.disk_key))
    error_message = "Write the ARN of a key, such as disk_key = \"arn:aws:kms:us-east-1:123456789012:key/1234abcd-...\". An alias does not suffice."
  }
}

variable "image" {
  description = "Image of hosts. Default: the one that spotfleet chooses at `up`."
  type        = string
  default     = null

  validation {
    condition     = var.image == null || can(regex("^ami-[0-9a-f]{8,17}$", var.image))
    error_message = "Write the id of an image of this region, such as image = \"ami-0a1b2c3d4e5f67890\", or leave it out."
  }
}

variable "dispatcher_image" {
  description = "Image of the dispatcher. Default: the one that spotfleet chooses at `up`, a plain Ubuntu."
  type        = string
  default     = null

  validation {
    condition     = var.dispatcher_image == null || can(regex("^ami-[0-9a-f]{8,17}$", var.dispatcher_image))
    error_message = "Write the id of an image of this region, such as dispatcher_image = \"ami-0a1b2c3d4e5f67890\", or leave it out."
  }
}

variable "disk_gib" {
  description = "GiB of a host's disk."
  type        = number
  default     = 100
  nullable    = false

  validation {
    condition     = var.disk_gib >= 8 && var.disk_gib <= 16384 && floor(var.disk_gib) == var.disk_gib
    error_message = "Write whole GiB, 8 to 16384, such as disk_gib = 100."
  }
}

variable "dispatcher_disk_gib" {
  description = "GiB of the dispatcher's disk."
  type        = number
  default     = 30
  nullable    = false

  validation {
    condition     = var.dispatcher_disk_gib >= 8 && var.dispatcher_disk_gib <= 16384 && floor(var.dispatcher_disk_gib) == var.dispatcher_disk_gib
    error_message = "Write whole GiB, 8 to 16384, such as dispatcher_disk_gib = 30."
  }
}

# ---- rights and events

variable "permissions_boundary" {
  description = "ARN of the policy that bounds both roles. Default: the module makes one, which allows what both roles need together."
  type        = string
  default     = null

  validation {
    condition     = var.permissions_boundary == null || can(regex("^arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/.+$", var.permissions_boundary))
    error_message = "Write the ARN of a policy, such as permissions_boundary = \"arn:aws:iam::123456789012:policy/boundary\", or leave it out."
  }
}

variable "interruption_queue" {
  description = "Make a queue with EventBridge's events about interruptions, which the dispatcher reads besides the notices that each host gets. One fleet at a time can read it."
  type        = bool
  default     = true
  nullable    = false
}

# ---- machines that Terraform itself makes

variable "dispatcher" {
  description = "A machine for a dispatcher that outlives fleets, with a disk of its own. Fleets of `provider: ssh` use it. Default: none; `spotfleet up` makes each fleet's dispatcher."
  type = object({
    image         = string
    instance_type = optional(string, "t3.small")
    key_pair      = optional(string)
    data_disk_gib = optional(number, 50)
    user          = optional(string, "ubuntu")
  })
  default = null

  validation {
    condition     = var.dispatcher == null || can(regex("^ami-[0-9a-f]{8,17}$", var.dispatcher.image))
    error_message = "The dispatcher needs an image of this region, such as dispatcher = { image = \"ami-0a1b2c3d4e5f67890\" }."
  }

  validation {
    condition     = var.dispatcher == null || try(var.dispatcher.data_disk_gib >= 8 && var.dispatcher.data_disk_gib <= 16384, false)
    error_message = "Write 8 to 16384 GiB for the dispatcher's disk, such as data_disk_gib = 50."
  }

  validation {
    condition     = var.dispatcher == null || can(regex("^[a-z_][a-z0-9_-]{0,31}$", var.dispatcher.user))
    error_message = "The dispatcher's user is its image's login name, such as user = \"ubuntu\"."
  }
}

variable "worker_group" {
  description = "An auto scaling group of spot machines of one kind. Fleets of `provider: ssh` use them. Default: none; the dispatcher launches its hosts itself."
  type = object({
    image          = string
    hosts          = number
    max_hosts      = optional(number)
    gpu            = optional(string)
    instance_types = optional(list(string), [])
    on_demand      = optional(number, 0)
    key_pair       = optional(string)
  })
  default = null

  validation {
    condition     = var.worker_group == null || can(regex("^ami-[0-9a-f]{8,17}$", var.worker_group.image))
    error_message = "The group needs an image of this region, such as worker_group = { image = \"ami-0a1b2c3d4e5f67890\", ... }."
  }

  validation {
    condition     = var.worker_group == null || try(var.worker_group.hosts >= 1 && floor(var.worker_group.hosts) == var.worker_group.hosts, false)
    error_message = "Write 1 or more hosts, such as hosts = 2. For no group at all leave worker_group out."
  }

  validation {
    condition     = var.worker_group == null || try(coalesce(var.worker_group.max_hosts, var.worker_group.hosts) >= var.worker_group.hosts, false)
    error_message = "max_hosts is below hosts. Raise it, or leave it out."
  }

  validation {
    condition     = var.worker_group == null || try(var.worker_group.gpu == null || contains(keys(jsondecode(file("${path.module}/data/gpus.json"))), var.worker_group.gpu), false)
    error_message = "Unknown GPU. Write one of ${join(", ", keys(jsondecode(file("${path.module}/data/gpus.json"))))}, such as gpu = \"A10G\", or name instance_types instead."
  }

  validation {
    condition     = var.worker_group == null || try((var.worker_group.gpu == null) == (length(var.worker_group.instance_types) > 0), false)
    error_message = "Name either a gpu, such as gpu = \"A10G\", or instance_types, such as instance_types = [\"g5.xlarge\"]."
  }
}
