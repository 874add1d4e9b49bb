locals {
  makes_network = var.vpc_id == null
  vpc_id        = local.makes_network ? aws_vpc.this[0].id : var.vpc_id
  zones         = local.makes_network ? slice(sort(data.aws_availability_zones.available[0].names), 0, min(var.zones, length(data.aws_availability_zones.available[0].names))) : []

  # Eight parts of equal size: public subnets in the upper half of the numbers, private ones in the lower.
  private_subnets = var.public_addresses ? {} : { for i, zone in local.zones : zone => cidrsubnet(var.cidr, 4, i) }
  public_subnets = {
    for i, zone in(var.public_addresses ? local.zones : slice(local.zones, 0, min(1, length(local.zones)))) :
    zone => cidrsubnet(var.cidr, 4, 8 + i)
  }

  subnet_ids = local.makes_network ? [
    for zone in local.zones : var.public_addresses ? aws_subnet.public[zone].id : aws_subnet.private[zone].id
  ] : var.subnet_ids
}

data "aws_availability_zones" "available" {
  count = local.makes_network ? 1 : 0
  state = "available"

  filter {
    name   = "zone-type"
    values = ["availability-zone"]
  }
}

resource "aws_vpc" "this" {
  count = local.makes_network ? 1 : 0

  cidr_block           = var.cidr
  enable_dns_hostnames = true
  enable_dns_support   = true
  tags                 = merge(local.tags, { Name = local.names.base })
}

# The VPC's own group, which machines without a group get, lets nothing in or out.
resource "aws_default_security_group" "this" {
  count  = local.makes_network ? 1 : 0
  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${local.names.base}-unused" })
}

resource "aws_internet_gateway" "this" {
  count  = local.makes_network ? 1 : 0
  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = local.names.base })
}

# ---- public subnets: of the machines with public addresses, else of the NAT gateway

resource "aws_subnet" "public" {
  for_each = local.public_subnets

  vpc_id                  = aws_vpc.this[0].id
  availability_zone       = each.key
  cidr_block              = each.value
  map_public_ip_on_launch = false # launches request an address themselves
  tags                    = merge(local.tags, { Name = "${local.names.base}-public-${each.key}" })
}

resource "aws_route_table" "public" {
  count  = local.makes_network ? 1 : 0
  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${local.names.base}-public" })
}

resource "aws_route" "public" {
  count                  = local.makes_network ? 1 : 0
  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "public" {
  for_each       = aws_subnet.public
  subnet_id      = each.value.id
  route_table_id = aws_route_table.public[0].id
}

# ---- private subnets, with one NAT gateway

locals {
  makes_nat = local.makes_network && !var.public_addresses
}

resource "aws_subnet" "private" {
  for_each = local.private_subnets

  vpc_id                  = aws_vpc.this[0].id
  availability_zone       = each.key
  cidr_block              = each.value
  map_public_ip_on_launch = false
  tags                    = merge(local.tags, { Name = "${local.names.base}-private-${each.key}" })
}

resource "aws_eip" "nat" {
  count  = local.makes_nat ? 1 : 0
  domain = "vpc"
  tags   = merge(local.tags, { Name = "${local.names.base}-nat" })
}

resource "aws_nat_gateway" "this" {
  count         = local.makes_nat ? 1 : 0
  allocation_id = aws_eip.nat[0].id
  subnet_id     = values(aws_subnet.public)[0].id
  tags          = merge(local.tags, { Name = local.names.base })

  depends_on = [aws_internet_gateway.this]
}

resource "aws_route_table" "private" {
  count  = local.makes_nat ? 1 : 0
  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${local.names.base}-private" })
}

resource "aws_route" "private" {
  count                  = local.makes_nat ? 1 : 0
  route_table_id         = aws_route_table.private[0].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

resource "aws_route_table_association" "private" {
  for_each       = aws_subnet.private
  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[0].id
}

# Traffic to S3, such as checkpoints, costs nothing by this way.
resource "aws_vpc_endpoint" "s3" {
  count             = local.makes_network ? 1 : 0
  vpc_id            = aws_vpc.this[0].id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = concat(aws_route_table.public[*].id, aws_route_table.private[*].id)
  tags              = merge(local.tags, { Name = "${local.names.base}-s3" })
}
