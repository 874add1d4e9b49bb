terraform {
  required_version = ">= 1.9"

  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = ">= 4.55, < 5.0"
    }
  }
}

provider "azurerm" {
  subscription_id     = var.subscription_id
  storage_use_azuread = true # the storage account takes no keys

  features {
    storage {
      data_plane_available = false # an Owner may not read in it, and the module need not
    }
  }
}
