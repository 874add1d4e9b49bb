output "spotfleet" {
  description = "The base, as the modules of all clouds describe theirs."
  value       = module.spotfleet.spotfleet
}
