# A base in the network, with the bucket and under the boundary that a company has already.

provider "aws" {
  region = var.region
}

module "spotfleet" {
  source = "../.."

  name       = "vision"
  region     = var.region
  vpc_id     = var.vpc_id
  subnet_ids = var.subnet_ids
  ssh_cidrs  = [var.office]
  bucket     = var.bucket

  permissions_boundary = var.permissions_boundary

  tags = { team = "vision" }
}
