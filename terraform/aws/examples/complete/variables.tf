variable "region" {
  description = "The region of the base."
  type        = string
  default     = "us-east-1"
}

variable "office" {
  description = "The network from which you reach private addresses, such as that of your VPN."
  type        = string
}

variable "key" {
  description = "ARN of the KMS key that encrypts disks and checkpoints."
  type        = string
}

variable "image" {
  description = "Image of the machines that Terraform makes: spotfleet's own (ami/README.md), or a plain Ubuntu."
  type        = string
}

variable "key_pair" {
  description = "EC2 key pair that may log in to these machines."
  type        = string
  default     = null
}
