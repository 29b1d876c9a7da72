"""Make models faster: rewrite a frozen model, pack it for the processor, or compile it; start at `optimize`."""
