resource "google_storage_bucket" "checkpoints" {
  count = var.bucket == null ? 1 : 0

  project                     = var.project
  name                        = "${local.full_name}-${var.project}"
  location                    = upper(var.region)
  labels                      = local.labels
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = false # a bucket with checkpoints in it stays

  versioning {
    enabled = true
  }

  # Old versions are kept already. Google would keep, and bill, what the rule below deletes for 7 days more.
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 7
    }
  }

  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      days_since_noncurrent_time = 7
      with_state                 = "ARCHIVED"
    }
  }

  dynamic "lifecycle_rule" {
    for_each = var.checkpoint_days > 0 ? [var.checkpoint_days] : []
    content {
      action {
        type = "Delete"
      }
      condition {
        age            = lifecycle_rule.value
        matches_prefix = ["${var.checkpoint_prefix}/"]
        with_state     = "LIVE"
      }
    }
  }

  dynamic "encryption" {
    for_each = var.disk_key == "" ? [] : [var.disk_key]
    content {
      default_kms_key_name = encryption.value
    }
  }
}

# Both read and write the folder of checkpoints, and nothing beside it.
resource "google_storage_bucket_iam_member" "checkpoints" {
  for_each = toset(["dispatcher", "host"])

  bucket = local.bucket
  role   = google_project_iam_custom_role.this["host"].name
  member = "serviceAccount:${google_service_account.this[each.key].email}"

  condition {
    title       = "${local.full_name} checkpoints"
    description = "Objects below ${var.checkpoint_prefix}/ only"
    expression = join(" || ", [
      "resource.type == 'storage.googleapis.com/Bucket'",
      "resource.name.startsWith('projects/_/buckets/${local.bucket}/objects/${var.checkpoint_prefix}/')",
    ])
  }
}

# `spotfleet up --discover NAME` reads it. Hosts may not write it: it is outside of their folder.
resource "google_storage_bucket_object" "base" {
  count = var.bucket == null ? 1 : 0

  bucket       = local.bucket
  name         = local.base_object
  content      = jsonencode(local.spotfleet)
  content_type = "application/json"
}
