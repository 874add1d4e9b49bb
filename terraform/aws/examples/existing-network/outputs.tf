output "spotfleet" {
  description = "The contract with the command line: `spotfleet up FILE --from-terraform .` reads it."
  value       = module.spotfleet.spotfleet
}
