"""What crosses a border: text of models and data, secrets, requests to servers, messages of processes."""
