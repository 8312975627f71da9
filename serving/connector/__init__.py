"""What runs inside vLLM: `plan` (what the API says, pure), `transfer` (KV in vLLM's pages, torch), `adapter` (vLLM itself)."""
