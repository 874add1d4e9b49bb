module "spotfleet" {
  source = "../.."

  name           = "research"
  region         = var.region
  resource_group = var.resource_group

  network = var.network
  subnets = ["${var.network}/subnets/${var.subnet}"]
  bucket  = var.container
}
