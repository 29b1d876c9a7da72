"""A converted model beside recorded results of the original code, stage by stage."""
