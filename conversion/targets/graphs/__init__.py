"""What a model's graph needs beside the model: operators that every runtime has, sizes to trace and to check it at."""
