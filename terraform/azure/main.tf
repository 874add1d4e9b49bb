data "azurerm_client_config" "current" {}

locals {
  version  = "0.1.0" # of this module, the same as spotfleet's
  contract = 1       # version of the output `spotfleet`

  full_name    = "spotfleet-${var.name}"
  tags         = merge(var.tags, { "spotfleet-base" = var.name, "spotfleet-managed-by" = "terraform" })
  subscription = data.azurerm_client_config.current.subscription_id

  group    = var.resource_group == null ? azurerm_resource_group.this[0].name : var.resource_group
  group_id = "/subscriptions/${local.subscription}/resourceGroups/${local.group}"

  create_network   = var.network == null
  network          = local.create_network ? azurerm_virtual_network.this[0].id : var.network
  subnets          = local.create_network ? [azurerm_subnet.this[0].id] : var.subnets
  network_group_id = local.create_network ? local.group_id : split("/providers/", var.network)[0]

  create_bucket   = var.bucket == null
  container       = local.create_bucket ? local.full_name : split("/containers/", var.bucket)[1]
  container_id    = local.create_bucket ? azurerm_storage_container.checkpoints[0].id : var.bucket
  storage_account = local.create_bucket ? azurerm_storage_account.checkpoints[0].name : split("/", var.bucket)[8]

  ubuntu = { publisher = "Canonical", offer = "ubuntu-24_04-lts", sku = "server", version = "latest" }
  gpus   = jsondecode(file("${path.module}/data/gpus.json"))
}

resource "azurerm_resource_group" "this" {
  count = var.resource_group == null ? 1 : 0

  name     = local.full_name
  location = var.region
  tags     = local.tags
}
