"""Random graphs: how they are drawn, what they must give, and how one that is wrong is made smaller."""
