"""Stages, worlds, fakes and drivers that tests share. No tests here."""
