# A base for a laptop without a VPN: machines have public addresses, and only the dispatcher lets SSH in, from yours.

provider "aws" {
  region = "us-east-1"
}

module "spotfleet" {
  source = "../.."

  name             = "research"
  region           = "us-east-1"
  public_addresses = true
  ssh_cidrs        = [var.my_address]
}
