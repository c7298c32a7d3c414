"""Questions of the five papers that train or open models again."""
