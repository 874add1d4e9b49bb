module "spotfleet" {
  source = "../.."

  name    = "research"
  project = var.project
  region  = var.region
}
