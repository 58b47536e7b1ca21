"""Buckets as sets of items: roots, coded symbols, comparison, receipts."""
