module "spotfleet" {
  source = "../.."

  name    = "research"
  project = var.project
  region  = var.region

  network = var.network
  subnets = [var.subnet]
  bucket  = var.bucket
}
