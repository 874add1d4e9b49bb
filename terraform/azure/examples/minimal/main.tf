module "spotfleet" {
  source = "../.."

  name   = "research"
  region = var.region
}
