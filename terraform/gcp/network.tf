resource "google_compute_network" "this" {
  count = local.create_network ? 1 : 0

  project                 = var.project
  name                    = local.full_name
  description             = "Fleets of spotfleet on base ${var.name}"
  auto_create_subnetworks = false
  routing_mode            = "REGIONAL"
}

resource "google_compute_subnetwork" "this" {
  count = local.create_network ? 1 : 0

  project                  = var.project
  name                     = local.full_name
  region                   = var.region
  network                  = google_compute_network.this[0].id
  ip_cidr_range            = var.cidr
  private_ip_google_access = true # buckets are reached without leaving Google's network
}

resource "google_compute_router" "this" {
  count = local.create_network && !var.public_addresses ? 1 : 0

  project = var.project
  name    = local.full_name
  region  = var.region
  network = google_compute_network.this[0].id
}

resource "google_compute_router_nat" "this" {
  count = local.create_network && !var.public_addresses ? 1 : 0

  project                            = var.project
  name                               = local.full_name
  region                             = var.region
  router                             = google_compute_router.this[0].name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "LIST_OF_SUBNETWORKS"

  subnetwork {
    name                    = google_compute_subnetwork.this[0].id
    source_ip_ranges_to_nat = ["ALL_IP_RANGES"]
  }

  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}
