resource "azurerm_storage_account" "checkpoints" {
  count = local.create_bucket ? 1 : 0

  # 3 to 24 letters and digits, and nobody else on Azure may have it.
  name                              = "sf${replace(var.name, "-", "")}${substr(sha256("${local.subscription} ${var.name}"), 0, 6)}"
  resource_group_name               = local.group
  location                          = var.region
  account_kind                      = "StorageV2"
  account_tier                      = "Standard"
  account_replication_type          = "LRS"
  min_tls_version                   = "TLS1_2"
  https_traffic_only_enabled        = true
  infrastructure_encryption_enabled = true
  allow_nested_items_to_be_public   = false
  shared_access_key_enabled         = false # identities only
  default_to_oauth_authentication   = true
  tags                              = local.tags

  blob_properties {
    versioning_enabled = true

    delete_retention_policy {
      days = 7
    }
    container_delete_retention_policy {
      days = 7
    }
  }

  lifecycle {
    prevent_destroy = true # Azure would remove it with all checkpoints: README.md, "Removing it"
  }
}

resource "azurerm_storage_container" "checkpoints" {
  count = local.create_bucket ? 1 : 0

  name                  = local.full_name
  storage_account_id    = azurerm_storage_account.checkpoints[0].id
  container_access_type = "private"

  lifecycle {
    prevent_destroy = true
  }
}

resource "azurerm_storage_management_policy" "checkpoints" {
  count = local.create_bucket ? 1 : 0

  storage_account_id = azurerm_storage_account.checkpoints[0].id

  rule {
    name    = "oldVersions" # letters and digits only
    enabled = true

    filters {
      blob_types = ["blockBlob"]
    }
    actions {
      version {
        delete_after_days_since_creation = 7
      }
    }
  }

  dynamic "rule" {
    for_each = var.checkpoint_days > 0 ? [var.checkpoint_days] : []
    content {
      name    = "oldCheckpoints"
      enabled = true

      filters {
        blob_types   = ["blockBlob"]
        prefix_match = ["${local.container}/${var.checkpoint_prefix}/"]
      }
      actions {
        base_blob {
          delete_after_days_since_modification_greater_than = rule.value
        }
      }
    }
  }
}
