variable "my_address" {
  description = "The network from which you reach the dispatcher, such as 203.0.113.7/32."
  type        = string
}
