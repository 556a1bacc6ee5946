"""Plans in the words of other engines: the flags that realise one, and start-up logs held against one."""
