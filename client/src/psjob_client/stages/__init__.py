"""What `psjob plan-stages` needs beside `psjob.planning`: the file of a profile, and the grid that a described machine is. Pure."""
