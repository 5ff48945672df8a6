"""Rare ways to guess, a file each, which can be deleted alone: no other room knows them but the servers."""
