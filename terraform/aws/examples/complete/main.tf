# Everything: private subnets, keys of your own, a dispatcher that outlives fleets, and a group of spot machines.

provider "aws" {
  region = var.region
}

module "spotfleet" {
  source = "../.."

  name      = "lab"
  region    = var.region
  cidr      = "10.80.0.0/20"
  zones     = 2
  ssh_cidrs = [var.office]

  bucket_key              = var.key
  disk_key                = var.key
  old_versions_days       = 3
  empty_bucket_on_destroy = true
  checkpoint_prefix       = "lab/checkpoints"

  dispatcher = {
    image         = var.image
    key_pair      = var.key_pair
    data_disk_gib = 20
  }

  worker_group = {
    image     = var.image
    key_pair  = var.key_pair
    gpu       = "A10G"
    hosts     = 2
    max_hosts = 4
  }

  tags = { team = "lab" }
}
