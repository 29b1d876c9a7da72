"""What a training learns: classes, a teacher, hidden patches, contrast."""
