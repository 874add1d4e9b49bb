module "spotfleet" {
  source = "../.."

  name    = "research"
  project = var.project
  region  = var.region
  zones   = ["${var.region}-b", "${var.region}-c"]

  cidr             = "10.61.0.0/20"
  public_addresses = true
  ssh_cidrs        = var.ssh_cidrs
  operators        = var.operators

  checkpoint_prefix = "vision"
  checkpoint_days   = 90
  disk_key          = var.disk_key
  disk_gib          = 200

  machine_type = "n1-standard-8"
  gpu          = { type = "nvidia-tesla-t4", count = 1 }

  dispatcher   = { ssh_public_key = var.ssh_public_key }
  worker_group = { hosts = 4, ssh_public_key = var.ssh_public_key }

  labels = { team = "vision" }
}
