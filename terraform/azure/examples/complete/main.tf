module "spotfleet" {
  source = "../.."

  name   = "research"
  region = var.region
  zones  = ["1", "2"]

  cidr             = "10.61.0.0/20"
  public_addresses = true
  ssh_cidrs        = var.ssh_cidrs

  checkpoint_prefix = "vision"
  checkpoint_days   = 90
  disk_key          = var.disk_key
  disk_gib          = 200
  image             = var.image

  dispatcher   = { ssh_public_key = var.ssh_public_key }
  worker_group = { hosts = 4, gpu = "T4", ssh_public_key = var.ssh_public_key }

  tags = { team = "vision" }
}
