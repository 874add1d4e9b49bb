output "spotfleet" {
  description = "The base, for `spotfleet up --from-terraform`."
  value       = module.spotfleet.spotfleet
}
