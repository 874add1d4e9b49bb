locals {
  makes_bucket = var.bucket == null
  bucket       = local.makes_bucket ? "spotfleet-${var.name}-${local.account}-${var.region}" : var.bucket
}

resource "aws_s3_bucket" "checkpoints" {
  count         = local.makes_bucket ? 1 : 0
  bucket        = local.bucket
  force_destroy = var.empty_bucket_on_destroy
  tags          = local.tags
}

resource "aws_s3_bucket_public_access_block" "checkpoints" {
  count                   = local.makes_bucket ? 1 : 0
  bucket                  = aws_s3_bucket.checkpoints[0].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "checkpoints" {
  count  = local.makes_bucket ? 1 : 0
  bucket = aws_s3_bucket.checkpoints[0].id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "checkpoints" {
  count  = local.makes_bucket ? 1 : 0
  bucket = aws_s3_bucket.checkpoints[0].id

  rule {
    bucket_key_enabled = var.bucket_key != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.bucket_key == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.bucket_key
    }
  }
}

# The dispatcher deletes checkpoints that are no longer needed; what it deleted, and what a lost host left half sent,
# goes after some days.
resource "aws_s3_bucket_lifecycle_configuration" "checkpoints" {
  count  = local.makes_bucket ? 1 : 0
  bucket = aws_s3_bucket.checkpoints[0].id

  rule {
    id     = "checkpoints"
    status = "Enabled"

    filter {
      prefix = "${var.checkpoint_prefix}/"
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }

    noncurrent_version_expiration {
      noncurrent_days = var.old_versions_days
    }

    expiration {
      expired_object_delete_marker = true
    }
  }

  depends_on = [aws_s3_bucket_versioning.checkpoints]
}
