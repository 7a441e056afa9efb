"""Connectors that also write down what happens. vLLM loads these modules by `kv_connector_module_path`."""
