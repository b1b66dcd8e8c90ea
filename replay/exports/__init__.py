"""What a run holds, in other people's forms, and its Samples as files: `rolltape export`, `rolltape convert`."""
