resource "azurerm_virtual_network" "this" {
  count = local.create_network ? 1 : 0

  name                = local.full_name
  resource_group_name = local.group
  location            = var.region
  address_space       = [var.cidr]
  tags                = local.tags
}

resource "azurerm_subnet" "this" {
  count = local.create_network ? 1 : 0

  name                            = local.full_name
  resource_group_name             = local.group
  virtual_network_name            = azurerm_virtual_network.this[0].name
  address_prefixes                = [var.cidr]
  service_endpoints               = ["Microsoft.Storage"] # checkpoints take no detour through NAT
  default_outbound_access_enabled = false                 # the way out is the NAT gateway, or a machine's own address
}

resource "azurerm_public_ip" "nat" {
  count = local.create_network && !var.public_addresses ? 1 : 0

  name                = "${local.full_name}-nat"
  resource_group_name = local.group
  location            = var.region
  allocation_method   = "Static"
  sku                 = "Standard"
  tags                = local.tags
}

resource "azurerm_nat_gateway" "this" {
  count = local.create_network && !var.public_addresses ? 1 : 0

  name                = local.full_name
  resource_group_name = local.group
  location            = var.region
  sku_name            = "Standard"
  tags                = local.tags
}

resource "azurerm_nat_gateway_public_ip_association" "this" {
  count = local.create_network && !var.public_addresses ? 1 : 0

  nat_gateway_id       = azurerm_nat_gateway.this[0].id
  public_ip_address_id = azurerm_public_ip.nat[0].id
}

resource "azurerm_subnet_nat_gateway_association" "this" {
  count = local.create_network && !var.public_addresses ? 1 : 0

  subnet_id      = azurerm_subnet.this[0].id
  nat_gateway_id = azurerm_nat_gateway.this[0].id
}
