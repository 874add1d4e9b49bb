# The permissions are those of `spotfleet check gcp --policy`: data/roles.json has the same lists.

resource "google_service_account" "this" {
  for_each = toset(["dispatcher", "host"])

  project      = var.project
  account_id   = "sf-${var.name}-${each.key}"
  display_name = "spotfleet ${each.key} on base ${var.name}"
}

# The right to act as a service account is none of the project's roles: it is granted on the one account.
resource "google_project_iam_custom_role" "this" {
  for_each = {
    dispatcher = setsubtract(local.roles.dispatcher, local.roles.act_as)
    laptop     = setsubtract(local.roles.laptop, local.roles.act_as)
    host       = local.roles.host
    act_as     = local.roles.act_as
    discover   = ["storage.buckets.list", "storage.objects.get"]
  }

  project     = var.project
  role_id     = "${local.role_id}_${each.key}"
  title       = "spotfleet ${var.name} ${each.key}"
  description = "Permissions of spotfleet's ${each.key} on base ${var.name}"
  stage       = "GA"
  permissions = sort(each.value)
}

resource "google_project_iam_member" "dispatcher" {
  project = var.project
  role    = google_project_iam_custom_role.this["dispatcher"].name
  member  = "serviceAccount:${google_service_account.this["dispatcher"].email}"

  condition {
    title       = "${local.full_name} region"
    description = "Machines and disks in ${var.region} only"
    expression = join(" || ", [
      "!(resource.type in ['compute.googleapis.com/Instance', 'compute.googleapis.com/Disk'])",
      "resource.name.extract('/zones/{zone}/') == ''",
      "resource.name.extract('/zones/{zone}/').startsWith('${var.region}-')",
    ])
  }
}

resource "google_project_iam_member" "operators" {
  for_each = toset(var.operators)

  project = var.project
  role    = google_project_iam_custom_role.this["laptop"].name
  member  = each.key
}

# `spotfleet up --discover NAME` lists the project's buckets and reads one object.
resource "google_project_iam_member" "operators_discover" {
  for_each = var.bucket == null ? toset(var.operators) : toset([])

  project = var.project
  role    = google_project_iam_custom_role.this["discover"].name
  member  = each.key

  condition {
    title       = "${local.full_name} description"
    description = "The object ${local.base_object} of the base's bucket only"
    expression = join(" || ", [
      "resource.type != 'storage.googleapis.com/Object'",
      "resource.name == 'projects/_/buckets/${local.bucket}/objects/${local.base_object}'",
    ])
  }
}

# The dispatcher gives its hosts their account; operators give the dispatcher its own.
resource "google_service_account_iam_member" "dispatcher_acts_as_host" {
  service_account_id = google_service_account.this["host"].name
  role               = google_project_iam_custom_role.this["act_as"].name
  member             = "serviceAccount:${google_service_account.this["dispatcher"].email}"
}

resource "google_service_account_iam_member" "operators_act_as" {
  for_each = { for pair in setproduct(var.operators, ["dispatcher", "host"]) : "${pair[0]} ${pair[1]}" => pair }

  service_account_id = google_service_account.this[each.value[1]].name
  role               = google_project_iam_custom_role.this["act_as"].name
  member             = each.value[0]
}
