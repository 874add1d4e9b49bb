resource "google_compute_region_instance_group_manager" "workers" {
  count = var.worker_group == null ? 0 : 1

  project                          = var.project
  name                             = "${local.full_name}-workers"
  region                           = var.region
  base_instance_name               = "${local.full_name}-worker"
  target_size                      = var.worker_group.hosts
  distribution_policy_zones        = length(var.zones) > 0 ? var.zones : null
  distribution_policy_target_shape = "ANY"

  version {
    instance_template = google_compute_instance_template.this["group"].id
  }

  update_policy {
    type                         = "OPPORTUNISTIC" # a new template ends no machine that trains
    minimal_action               = "REPLACE"
    instance_redistribution_type = "NONE"
    max_surge_fixed              = 0
    max_unavailable_fixed        = max(1, length(var.zones) > 0 ? length(var.zones) : 3)
  }

  lifecycle {
    ignore_changes = [target_size] # resized by you, not back by the next apply
  }
}
