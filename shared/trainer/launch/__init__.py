"""Chapter 12. From a layout's name to processes: started here, joined by others, or compared with one."""
