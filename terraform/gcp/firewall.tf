# Rules go by network tags, like those of a fleet without a base. Rules have no labels, and these have no description in
# the CLI's format, so `spotfleet down` never lists them.
# The rules of a shared VPC belong to its host project.

resource "google_compute_firewall" "inside" {
  count = local.network_project == var.project ? 1 : 0

  project     = var.project
  name        = "${local.full_name}-in"
  description = "Machines of fleets on base ${var.name} reach each other on every port"
  network     = local.network
  direction   = "INGRESS"
  source_tags = [local.tag]
  target_tags = [local.tag]

  allow {
    protocol = "all"
  }
}

resource "google_compute_firewall" "ssh" {
  count = local.network_project == var.project && length(var.ssh_cidrs) > 0 ? 1 : 0

  project       = var.project
  name          = "${local.full_name}-ssh"
  description   = "SSH to dispatchers on base ${var.name}"
  network       = local.network
  direction     = "INGRESS"
  source_ranges = var.ssh_cidrs
  target_tags   = [local.door_tag]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}
