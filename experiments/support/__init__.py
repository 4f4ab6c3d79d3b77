"""What the scripts share: prompts, models, paired runs, timing, reports, records."""
