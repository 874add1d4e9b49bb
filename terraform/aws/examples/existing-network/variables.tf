variable "region" {
  description = "The region of the VPC."
  type        = string
}

variable "vpc_id" {
  description = "The VPC that you have."
  type        = string
}

variable "subnet_ids" {
  description = "Its private subnets, with a way out by NAT."
  type        = list(string)
}

variable "office" {
  description = "The network from which you reach private addresses, such as that of your VPN."
  type        = string
}

variable "bucket" {
  description = "A bucket that you have, for checkpoints."
  type        = string
}

variable "permissions_boundary" {
  description = "ARN of the policy that your organization puts on every role."
  type        = string
}
